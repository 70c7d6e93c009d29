"""Environments: conversations in which a model is asked, answers and is rewarded."""
