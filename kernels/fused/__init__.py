"""Operations between products, each as one pass: norms, rotation, MLP, sampling, look-up."""
