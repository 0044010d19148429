"""How the demo model is made: corpus, tokenizer, training, export, evaluation, outside check.

Needs what requirements.txt lists; the ordinary package and its tests never import this.
"""
