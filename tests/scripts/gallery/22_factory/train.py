import torch
from models import create_model

torch.manual_seed(0)
model = create_model("tiny_net", pretrained=False, num_classes=4, in_chans=3).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(5):
    x, y = torch.randn(4, 3, 10, 10).half(), torch.randint(0, 4, (4,))
    if step == 3:
        x[1] *= 1000
    out = model(x)
    loss = torch.nn.functional.cross_entropy(out.float(), y)
    if not torch.isfinite(out).all():
        torch.save({"arch": "tiny_net", "state_dict": model.state_dict(), "x": x, "y": y, "out": out.detach(), "optimizer": optimizer.state_dict()},
                   "tiny_nan.pth")
        raise RuntimeError("inf/nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
