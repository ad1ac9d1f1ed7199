import torch
import torch.nn.functional as F
from net import SegNet

if __name__ == "__main__":
    torch.manual_seed(0)
    model = SegNet()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(4):
        image, mask = torch.rand(2, 3, 20, 20), torch.zeros(2, 1, 20, 20)
        mask[:, :, 2:7, 3:9] = 1
        if step == 2:
            image[0, :, 8:18, 8:18] = 1.0
        logit = model(image)
        loss = F.binary_cross_entropy_with_logits(logit, mask)
        if not torch.isfinite(logit).all():
            torch.save({"state_dict": model.state_dict(), "image": image.numpy(), "mask": mask.numpy(), "logit": logit.detach().numpy()},
                       "seg_fold0_0002_nan.pth")
            raise RuntimeError("non-finite output")
        optimizer.zero_grad(); loss.backward(); optimizer.step()
