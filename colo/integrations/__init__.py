"""Libraries that place colo's trainers and engines on other machines."""
