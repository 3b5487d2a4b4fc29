"""Documents, what they cost, and who computes them: everything that a plan is made of."""
