"""The script of `launch`: `_launch_script.py ANSWER_FILE [steps]`."""

import time

FIRST_LINE = time.time()

if __name__ == "__main__":
    import json
    import os
    import sys
    from pathlib import Path

    answer: dict[str, object] = {"first": FIRST_LINE}
    if sys.argv[2:] == ["steps"]:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        sys.path.insert(0, str(Path(__file__).parents[2]))
        from benchmarks.scenarios.ddp_steps import mlp, train

        dist.init_process_group("gloo")
        answer["rate"] = train(DistributedDataParallel(mlp()))["rate"]
        dist.barrier()  # gloo may abort a process whose peer closes its connections first
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(answer))
