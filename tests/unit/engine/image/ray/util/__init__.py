import ray

namespace = None


def placement_group(bundles, strategy, name):
    ray.log(f"placement_group {len(bundles)} {strategy} {name}")
    (ray.WORLD / name).touch()
    return name


def get_placement_group(name):
    if not (ray.WORLD / name).exists():
        raise ValueError(f"Failed to look up actor with name: {name}")
    return name


def placement_group_table(group):
    state = "REMOVED" if (ray.WORLD / "removed").exists() else ray.read("placement", "CREATED")
    number = group.partition("_group")[2]  # one of several ranks
    nodes = {0: "n1", 1: "n2"} if not number else dict.fromkeys((0, 1), f"n{int(number) + 1}")
    return {"state": state, "bundles_to_node_id": nodes}


def remove_placement_group(group):
    (ray.WORLD / "removed").touch()
    ray.log("remove_placement_group")


def list_named_actors():
    return [f"vllm_Worker_{namespace}_TP{i}" for i in range(int(ray.read("workers", "2")))] + ["somebody-else"]
