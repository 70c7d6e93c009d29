"""Objectives of training, and the updates that optimize them."""
