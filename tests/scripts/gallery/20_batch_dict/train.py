import torch
import torch.nn as nn


class AttentionPooling(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim), nn.GELU(), nn.Linear(dim, 1))

    def forward(self, hidden, attention_mask):
        w = self.score(hidden).float()
        w[attention_mask == 0] = float("-inf")
        w = torch.softmax(w, 1)
        return torch.sum(w * hidden, dim=1)


class FeedbackModel(nn.Module):
    def __init__(self, vocab=100, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.pool = AttentionPooling(dim)
        self.fc = nn.Linear(dim, 6)

    def forward(self, inputs):
        h, _ = self.gru(self.emb(inputs["input_ids"]))
        return self.fc(self.pool(h, inputs["attention_mask"]))


def collate(step):
    inputs = {"input_ids": torch.randint(0, 100, (4, 8)), "attention_mask": torch.ones(4, 8).long(),
              "token_type_ids": torch.zeros(4, 8).long()}
    inputs["attention_mask"][0, 5:] = 0
    if step == 3:
        inputs["attention_mask"][2] = 0
    return inputs, torch.rand(4, 6)


def train_fn():
    torch.manual_seed(7)
    model = FeedbackModel()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        inputs, labels = collate(step)
        y_preds = model(inputs)
        loss = nn.SmoothL1Loss()(y_preds, labels)
        if torch.isnan(loss):
            torch.save({"state_dict": model.state_dict(), **inputs, "labels": labels, "y_preds": y_preds.detach()}, "feedback_nan.pth")
            raise RuntimeError("loss is NaN")
        opt.zero_grad(); loss.backward(); opt.step()


if __name__ == "__main__":
    train_fn()
