"""Options of the counted schedulers that are compared with diffusers' own."""

import torch

from tests.parity.schedulers.loops import STABLE_DIFFUSION

PROCESS = {
    "defaults": {},
    "stable-diffusion": {**STABLE_DIFFUSION, "steps_offset": 1, "timestep_spacing": "leading"},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "trained-betas": {"num_train_timesteps": 60, "trained_betas": torch.linspace(0.001, 0.2, 60).tolist()},
    "velocity": {**STABLE_DIFFUSION, "prediction_type": "v_prediction"},
    "trailing": {**STABLE_DIFFUSION, "timestep_spacing": "trailing"},
    "linspace": {**STABLE_DIFFUSION, "timestep_spacing": "linspace"},
    "zero-snr": {
        **STABLE_DIFFUSION,
        "rescale_betas_zero_snr": True,
        "prediction_type": "v_prediction",
        "timestep_spacing": "trailing",
    },
}
WITHOUT_ZERO_SNR = {name: options for name, options in PROCESS.items() if name != "zero-snr"}
SPACED = {
    "karras": {**STABLE_DIFFUSION, "use_karras_sigmas": True},
    "exponential": {**STABLE_DIFFUSION, "use_exponential_sigmas": True},
    "beta": {**STABLE_DIFFUSION, "use_beta_sigmas": True},
    "karras-cosine": {"beta_schedule": "squaredcos_cap_v2", "use_karras_sigmas": True},
    "beta-trailing": {**STABLE_DIFFUSION, "use_beta_sigmas": True, "timestep_spacing": "trailing"},
}
SIGMA_MIN_LAST = {
    "sigma-min-last": {**STABLE_DIFFUSION, "final_sigmas_type": "sigma_min"},
    "beta-sigma-min-last": {**STABLE_DIFFUSION, "use_beta_sigmas": True, "final_sigmas_type": "sigma_min"},
}
THRESHOLDING = {**STABLE_DIFFUSION, "thresholding": True, "sample_max_value": 2.0}
SAMPLE = {**STABLE_DIFFUSION, "prediction_type": "sample"}
VELOCITY = {**STABLE_DIFFUSION, "prediction_type": "v_prediction"}
FLOWS = {
    "flow": {"use_flow_sigmas": True, "prediction_type": "flow_prediction"},
    "flow-shift": {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0},
    "flow-epsilon": {"use_flow_sigmas": True},
    "flow-velocity": {"use_flow_sigmas": True, "prediction_type": "v_prediction"},
    "flow-sample": {"use_flow_sigmas": True, "prediction_type": "sample"},
    "flow-third-order": {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "solver_order": 3},
    "flow-without-its-sigmas": {**STABLE_DIFFUSION, "prediction_type": "flow_prediction"},
}


def of_algorithm(name, **options):
    """Return option sets of a DPM-Solver algorithm on eps."""
    base = {"algorithm_type": name, "final_sigmas_type": "sigma_min", **options}
    return {
        name: {**STABLE_DIFFUSION, **base},
        f"{name}-first-order": {**STABLE_DIFFUSION, **base, "solver_order": 1},
        f"{name}-heun": {**STABLE_DIFFUSION, **base, "solver_type": "heun"},
        f"{name}-velocity": {**VELOCITY, **base},
        f"{name}-sample": {**SAMPLE, **base},
        f"{name}-karras": {**STABLE_DIFFUSION, **base, "use_karras_sigmas": True},
        f"{name}-flow": {**base, "use_flow_sigmas": True},
    }


DPM2 = {  # diffusers' constructor takes a second or more for 1000 training steps
    name: options if name in ("defaults", "trained-betas") else {**options, "num_train_timesteps": 200}
    for name, options in (WITHOUT_ZERO_SNR | SPACED).items()
}
THIRD_ORDER = {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min", "solver_order": 3}
SOLVERS = {
    "KDPM2DiscreteScheduler": DPM2,
    # diffusers' pictures are NaN for a cosine in few steps; see tests/samplers/test_dpm2.py
    "KDPM2AncestralDiscreteScheduler": {name: options for name, options in DPM2.items() if "cosine" not in name},
    "DEISMultistepScheduler": WITHOUT_ZERO_SNR
    | SPACED
    | FLOWS
    | {
        "first-order": {**STABLE_DIFFUSION, "solver_order": 1},
        "third-order": {**STABLE_DIFFUSION, "solver_order": 3},
        "third-order-to-the-end": {**STABLE_DIFFUSION, "solver_order": 3, "lower_order_final": False},
        "sample": SAMPLE,
        "thresholding": THRESHOLDING,
        "thresholding-velocity": THRESHOLDING | VELOCITY,
    },
    "DPMSolverSinglestepScheduler": {
        name: {key: value for key, value in options.items() if key not in ("timestep_spacing", "steps_offset")}
        for name, options in (WITHOUT_ZERO_SNR | SPACED | SIGMA_MIN_LAST | FLOWS).items()
        if name not in ("trailing", "linspace", "beta-trailing")
    }
    | of_algorithm("dpmsolver")
    | {
        "first-order": {**STABLE_DIFFUSION, "solver_order": 1},
        "third-order": {**STABLE_DIFFUSION, "solver_order": 3},
        "third-order-heun": {**STABLE_DIFFUSION, "solver_order": 3, "solver_type": "heun"},
        "third-order-sigma-min-last": {**STABLE_DIFFUSION, "solver_order": 3, "final_sigmas_type": "sigma_min"},
        "lower-order-final": {**STABLE_DIFFUSION, "lower_order_final": True, "final_sigmas_type": "sigma_min"},
        "heun": {**STABLE_DIFFUSION, "solver_type": "heun"},
        "sample": SAMPLE,
        "thresholding": THRESHOLDING,
        "clipped-cosine": {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1},
        "sde": {**STABLE_DIFFUSION, "algorithm_type": "sde-dpmsolver++"},
        "sde-heun": {**STABLE_DIFFUSION, "algorithm_type": "sde-dpmsolver++", "solver_type": "heun"},
        "sde-third-order": {**STABLE_DIFFUSION, "algorithm_type": "sde-dpmsolver++", "solver_order": 3},
        "sde-third-order-heun": {
            **STABLE_DIFFUSION,
            "algorithm_type": "sde-dpmsolver++",
            "solver_order": 3,
            "solver_type": "heun",
        },
        "dpmsolver-third-order": STABLE_DIFFUSION | THIRD_ORDER,
        "dpmsolver-third-order-heun": {**STABLE_DIFFUSION, **THIRD_ORDER, "solver_type": "heun"},
    },
    "DPMSolverMultistepScheduler": FLOWS
    | of_algorithm("dpmsolver")
    | of_algorithm("sde-dpmsolver")
    | {
        "dpmsolver-third-order": STABLE_DIFFUSION | THIRD_ORDER,
        "dpmsolver-thresholding": {**THRESHOLDING, "algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
        "flow-sde": {"use_flow_sigmas": True, "algorithm_type": "sde-dpmsolver++"},
        "lu-cosine": {"beta_schedule": "squaredcos_cap_v2", "use_lu_lambdas": True},
    },
}
