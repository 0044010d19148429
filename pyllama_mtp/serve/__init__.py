"""An OpenAI-compatible HTTP server on one model; ``pyllama-mtp serve``. Needs the extra ``serve``.

``app`` has the routes and runs them; ``bodies`` checks requests; ``generator`` is the one thread
that calls the native library, and what Prometheus reads of it; ``answers`` makes the driver's
requests and writes the responses; ``responses`` does so for the Responses API; ``page.html`` is the
page to chat with.
"""
