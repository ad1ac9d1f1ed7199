import torch
import torch.nn as nn


class CosineHead(nn.Module):
    def __init__(self, dim, classes, scale=16.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dim))
        self.scale = scale

    def forward(self, x):
        x = x / x.norm(dim=1, keepdim=True)
        w = self.weight / self.weight.norm(dim=1, keepdim=True)
        return self.scale * x @ w.t()


class Classifier(nn.Module):
    def __init__(self, num_classes=10, width=32):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(20, width), nn.ReLU())
        self.head = CosineHead(width, num_classes)

    def forward(self, inputs):
        return self.head(self.features(inputs))


if __name__ == "__main__":
    torch.manual_seed(0)
    net = Classifier(num_classes=5)
    with torch.no_grad():
        net.features[0].bias.fill_(-0.5)
    model = torch.nn.DataParallel(torch.compile(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(4):
        inputs, targets = torch.randn(8, 20), torch.randint(0, 5, (8,))
        if step == 2:
            inputs[6] *= 0
        outputs = net(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        if not torch.isfinite(loss):
            torch.save({"epoch": 0, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "inputs": inputs, "targets": targets, "outputs": outputs.detach()}, "model_nan.pth")
            raise FloatingPointError
        optimizer.zero_grad(); loss.backward(); optimizer.step()
