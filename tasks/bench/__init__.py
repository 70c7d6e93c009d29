"""Measurements of the parts that compute, each against what it is made of."""
