"""llama.cpp from Python: models, contexts, batches, samplers. All that calls the library."""
