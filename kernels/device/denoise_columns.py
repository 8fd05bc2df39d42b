"""The columns of the table of steps, which `denoise_kernel` reads. This file imports no Triton."""

# The coefficients in a row of the table, for a model output m, the current picture x_t and unit noise z:
#   x0      = clip((x0_x * x_t + x0_m * m) / x0_div), to [-clip_range, clip_range] if clip_range is above 0
#   x_{t-1} = prev_x0 * x0 + prev_x * x_t + prev_m * m + std * z
# std is sigma, or with a learned variance sigma times the model's deviation; "learned_range" interpolates between the
# two log variances.
#
# A row whose reads_earlier is 1 also reads a sample s kept by an earlier call, and the outputs kept by the three calls
# before this one: h1 (the latest), h2 and h3. It adds prev_y * y + prev_h1 * h1 + prev_h2 * h2 + prev_h3 * h3 to
# x_{t-1}, with:
#   y      = y_x * x_t + y_x0 * x0 + y_s * s + y_h1 * h1 + y_h2 * h2 + y_h3 * h3, kept as the next call's s
#   output = keep_x * x_t + keep_x0 * x0 + keep_m * m, kept as the next call's h1 if keeps_output is 1
# input_div divides x_t to give the model's input, outside of the step.
COLUMNS = (
    "x0_x", "x0_m", "x0_div", "prev_x0", "prev_x", "prev_m", "sigma", "log_variance_min", "log_variance_max",
    "prev_y", "prev_h1", "prev_h2", "prev_h3", "y_x", "y_x0", "y_s", "y_h1", "y_h2", "y_h3",
    "keep_x", "keep_x0", "keep_m", "input_div", "clip_range", "reads_earlier", "keeps_output",
)  # fmt: skip
EARLIER = 4  # tensors that earlier calls kept: s, h1, h2 and h3
