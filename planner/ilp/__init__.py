"""The paper's integer program: the model, its solvers, the search over device orders."""
