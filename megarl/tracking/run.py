import json
class RunTracker:
    run_id=""
    def __init__(self, parts, path=None): self.path=path
    def log(self, metrics, *, step):
        if self.path: open(self.path,'a').write(json.dumps({"step":step,**metrics})+"\n")
        print(step, {k:round(v,5) for k,v in metrics.items() if not k.startswith('zz')}, flush=True)
    def log_rollouts(self, groups, *, step): pass
    def log_file(self, p): pass
    def close(self, status): print(status)
def open_tracker(config, run_id, step):
    config.run_folder.mkdir(parents=True, exist_ok=True)
    return RunTracker([], config.run_folder/"metrics.jsonl")
