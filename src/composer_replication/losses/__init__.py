"""Which number is minimised?

Pure functions of tensors, masks and weights; no model, no trainer, no file. A channel
is off unless the recipe gives it a weight.
"""
