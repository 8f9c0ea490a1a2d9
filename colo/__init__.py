"""colo: one GPU, an inference engine and a trainer that take turns on one copy of the weights."""
