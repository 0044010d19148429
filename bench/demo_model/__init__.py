"""How the demo model is made: corpus, tokenizer, training, export, evaluation, outside check.

Needs what requirements.txt lists, and the package. Ordinary tests import pictures.py alone, which
needs numpy.
"""

import os

# Before PyTorch is imported: threads that wait for each other sleep instead of spinning. On a
# machine with other work on its cores, spinning made a training step about five times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
