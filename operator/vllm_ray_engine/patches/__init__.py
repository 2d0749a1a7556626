"""What is changed in vLLM and Ray, each a wrapper of one function; the table of them is in `plugin`."""
