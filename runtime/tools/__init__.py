"""Commands beside the product's own: bench, check, evaluate, lm-evaluation-harness."""
