"""Real small parts that tests of several rooms use; nothing here is collected."""
