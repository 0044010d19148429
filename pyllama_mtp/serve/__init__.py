"""An OpenAI-compatible HTTP server on one model; ``pyllama-mtp serve``. Needs the extra ``serve``.

``server`` runs it; ``app`` has the routes; ``bodies`` what a request may say; ``jobs`` makes
requests of it for the driver; ``generator`` is the one thread that calls the native library;
``replies`` and ``logprobs`` are what goes back; ``metrics`` is for Prometheus.
"""
