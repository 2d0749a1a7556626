"""What is wrong, before a start (the doctor's facts and checks) and after an end (root causes in a log)."""
