"""Processes and what they leave behind: trees that end with their root, debris that is cleaned up."""
