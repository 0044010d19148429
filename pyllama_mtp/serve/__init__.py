"""An OpenAI-compatible HTTP server on one model; ``pyllama-mtp serve``. Needs the extra ``serve``.

``server`` runs it; ``app`` has the routes; ``bodies`` checks requests; ``jobs`` turns them into
requests of the driver; ``generator`` is the one thread that calls the native library; ``replies``
writes the responses; ``metrics`` is for Prometheus.
"""
