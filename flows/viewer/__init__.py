"""`ratchet view`: a local web application over the store. It only reads."""
