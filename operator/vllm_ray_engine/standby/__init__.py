"""A hand-over without imports: Ray workers started ahead, and modules imported before they are needed."""
