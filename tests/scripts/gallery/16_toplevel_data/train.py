import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F

df = pd.read_csv("train.csv")
classes = sorted(df.label.unique())
df["target"] = df.label.map({c: i for i, c in enumerate(classes)})
NUM_CLASSES = len(classes)
images = np.random.RandomState(0).rand(len(df), 24).astype("float32")


class ArcFace(nn.Module):
    def __init__(self, dim, n, m=0.3, s=30.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, dim))
        self.m, self.s = m, s

    def forward(self, x, label):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight)) * 1.000001
        sine = torch.sqrt(1.0 - cosine ** 2)
        phi = cosine * float(np.cos(self.m)) - sine * float(np.sin(self.m))
        hot = F.one_hot(label, cosine.shape[1])
        return self.s * (hot * phi + (1 - hot) * cosine)


class EmbeddingModel(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.backbone = nn.Linear(24, dim)
        self.arc = ArcFace(dim, NUM_CLASSES)

    def forward(self, image, label):
        return self.arc(self.backbone(image), label)


torch.manual_seed(0)
model = EmbeddingModel()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(5):
    rows = np.random.RandomState(step).choice(len(df), 8)
    image, label = torch.from_numpy(images[rows]), torch.from_numpy(df.target.values[rows])
    if step == 3:
        with torch.no_grad():
            model.arc.weight[label[0]] = model.backbone(image[:1])[0]
    logit = model(image, label)
    loss = F.cross_entropy(logit, label)
    if not torch.isfinite(logit).all():
        torch.save({"state_dict": model.state_dict(), "image": image.numpy(), "label": label.numpy(), "logit": logit.detach().numpy()}, "arc_nan.pth")
        raise RuntimeError("nan")
    opt.zero_grad(); loss.backward(); opt.step()
