"""Objectives: advantages, losses and their configuration, as functions of arrays that know no model."""
