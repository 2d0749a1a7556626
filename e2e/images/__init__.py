"""Builds the project's container images and runs commands inside them.

Images are content-addressed: the tag is a hash of every file and setting that goes into the build, so an image that
exists is never built again and a tag never changes its meaning. See `python -m e2e.images --help`.
"""
