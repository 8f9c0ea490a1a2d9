"""What torch reads once in a process and tests on CUDA need."""

import os

# read at the first call of cuBLAS: without it `use_deterministic_algorithms` refuses every product of matrices
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
