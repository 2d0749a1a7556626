"""The process around the planner: watches, work queue, the loop, leader election, health, metrics, logging."""
