"""The stages of an iteration: functions from manifests to a manifest."""
