"""Pure planning: what was observed, and the time, to actions and a status. No I/O, no clock."""
