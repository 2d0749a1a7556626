import ray

namespace = None


def placement_group(bundles, strategy, name):
    ray.log(f"placement_group {len(bundles)} {strategy} {name}")
    (ray.WORLD / "group").write_text(name)
    return name


def get_placement_group(name):
    if not (ray.WORLD / "group").exists():
        raise ValueError(f"Failed to look up actor with name: {name}")
    return (ray.WORLD / "group").read_text()


def placement_group_table(group):
    state = "REMOVED" if (ray.WORLD / "removed").exists() else ray.read("placement", "CREATED")
    return {"state": state, "bundles_to_node_id": {0: "n1", 1: "n2"}}


def remove_placement_group(group):
    (ray.WORLD / "removed").touch()
    ray.log("remove_placement_group")


def list_named_actors():
    return [f"vllm_Worker_{namespace}_TP{i}" for i in range(int(ray.read("workers", "2")))] + ["somebody-else"]
