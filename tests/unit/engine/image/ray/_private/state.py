def available_resources_per_node():
    return {"n1": {"GPU": 1.0, "vd-slot-0": 1.0}, "n2": {}}
