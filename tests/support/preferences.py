"""Every preference, as the tests of losses go through them."""

from __future__ import annotations

import fastrl

PREFERENCES = {
    **{name: make() for name, make in fastrl.PREFERENCES.items()},
    "cDPO": fastrl.DPO(0.3, label_smoothing=0.2),
    "DPO of means": fastrl.DPO(0.5, average=True),
    "DPO with a margin and a likelihood": fastrl.DPO(0.2, gamma=0.7, nll_coef=0.3),
    "IPO of sums without a reference": fastrl.IPO(0.4, average=False, reference=False),
    "hinge of CPO": fastrl.Hinge(0.6, reference=False, nll_coef=1.0),
    "hinge with a margin": fastrl.Hinge(0.1, gamma=-0.5),
    "robust, half flipped": fastrl.RobustDPO(0.7, label_smoothing=0.45),
    "robust, none flipped": fastrl.RobustDPO(0.7, label_smoothing=0.0),
    "SPPO of means": fastrl.SPPO(2.0, average=True),
    "SimPO, smoothed": fastrl.SimPO(2.5, gamma=1.4, label_smoothing=0.1),
    "EXO, smoother": fastrl.EXOPair(1.5, label_smoothing=0.2),
    "DiscoPOP, wide": fastrl.DiscoPOP(0.4, tau=0.7),
}
