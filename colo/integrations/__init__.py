"""colo inside trainers that people have."""
