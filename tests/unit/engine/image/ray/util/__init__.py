import ray

namespace = None


def placement_group(bundles, strategy, name):
    ray.log(f"placement_group {len(bundles)} {strategy} {name}")
    return name


def placement_group_table(group):
    state = "REMOVED" if (ray.WORLD / "removed").exists() else ray.read("placement", "CREATED")
    return {"state": state, "bundles_to_node_id": {0: "n1", 1: "n2"}}


def remove_placement_group(group):
    (ray.WORLD / "removed").touch()
    ray.log("remove_placement_group")


def list_named_actors():
    return [f"vllm_Worker_{namespace}_TP{i}" for i in range(int(ray.read("workers", "2")))] + ["somebody-else"]
