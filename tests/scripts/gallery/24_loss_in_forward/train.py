import argparse
import torch
from modeling import ForClassification

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = ForClassification()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    batch = {"input_ids": torch.randint(0, 60, (6, 12)), "attention_mask": torch.ones(6, 12), "labels": torch.randint(0, 3, (6,))}
    batch["attention_mask"][3, 4:] = 0
    if step == 3:
        with torch.no_grad():
            model.classifier.weight *= 300
    output = model(**batch)
    if not torch.isfinite(output["loss"]):
        torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "batch": batch,
                    "loss": output["loss"].item(), "logits": output["logits"].detach()}, "clf_nan.pth")
        raise RuntimeError(f"step {step}: loss is {output['loss'].item()}")
    optimizer.zero_grad()
    output["loss"].backward()
    optimizer.step()
