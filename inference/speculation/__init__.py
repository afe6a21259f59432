"""How many candidates are worth verifying: calibration, cost model, choice of the tree."""
