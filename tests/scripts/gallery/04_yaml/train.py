import torch
import torch.nn as nn
import yaml

with open("config.yaml") as f:
    cfg = yaml.safe_load(f)


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        m = cfg["model"]
        self.embedding = nn.Embedding(m["vocab"], m["dim"])
        self.q = nn.Linear(m["dim"], m["dim"])
        self.k = nn.Linear(m["dim"], m["dim"])
        self.head = nn.Linear(m["dim"], m["classes"])

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        score = self.q(x) @ self.k(x).transpose(1, 2)
        score = score.masked_fill(attention_mask[:, None, :] == 0, float("-inf"))
        weights = torch.softmax(score, dim=-1)
        return self.head((weights @ x).mean(1))


if __name__ == "__main__":
    torch.manual_seed(1)
    model = Encoder(cfg)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["train"]["lr"])
    for step in range(cfg["train"]["steps"]):
        input_ids = torch.randint(0, cfg["model"]["vocab"], (6, 10))
        attention_mask = torch.ones(6, 10, dtype=torch.long)
        attention_mask[:, 7:] = 0
        if step == 3:
            attention_mask[4] = 0
        labels = torch.randint(0, 4, (6,))
        logits = model(input_ids, attention_mask)
        loss = nn.functional.cross_entropy(logits, labels)
        if torch.isnan(loss):
            torch.save({"state_dict": model.state_dict(), "input_ids": input_ids, "attention_mask": attention_mask,
                        "labels": labels, "logits": logits.detach(), "step": step}, "step_nan.pth")
            raise ValueError("loss is nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
