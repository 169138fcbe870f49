"""Plan in, tokens out: models, caches, stages, the pipeline and its scheduler."""
