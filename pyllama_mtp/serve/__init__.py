"""An OpenAI-compatible HTTP server on one model; ``pyllama-mtp serve``. Needs the extra ``serve``.

``app`` has the routes and runs them; ``bodies`` checks requests; ``jobs`` turns them into requests
of the driver; ``generator`` is the one thread that calls the native library, and what Prometheus
reads of it; ``replies`` writes the responses.
"""
