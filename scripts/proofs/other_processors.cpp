// Runs the router's kernels over cases in a file; built and called by other_processors.py.
//
// A case: sizes, constants of the score, x, W_q, gain, anchors, and gradients of logits and weights.
// Its results: logits, weights, gradients of W_q, gain, anchors, all fp32; indices; the gradient of x.

#include <cstdio>
#include <cstdlib>

#include "backward.cpp"
#include "forward.cpp"

namespace {

template <typename Number>
std::vector<Number> read(FILE* from, int64_t count) {
  std::vector<Number> numbers(count);
  if (fread(numbers.data(), sizeof(Number), count, from) != size_t(count)) exit(3);
  return numbers;
}

template <typename Number>
void write(FILE* to, const std::vector<Number>& numbers) {
  fwrite(numbers.data(), sizeof(Number), numbers.size(), to);
}

}  // namespace

int main(int, char** names) {
  FILE *in = fopen(names[1], "rb"), *out = fopen(names[2], "wb");
  Sizes s;
  while (fread(&s, sizeof s, 1, in) == 1) {
    const auto c = read<ScoreConstants>(in, 1);
    const int64_t t = s.tokens, k = s.top_k, n = s.experts, r = s.rank, d = s.hidden;
    auto x = read<char>(in, t * d * (s.bf16 ? 2 : 4));
    auto weight = read<float>(in, r * d), gain = read<float>(in, d);
    auto anchors = read<float>(in, r * s.num_anchors());
    auto up_logits = read<float>(in, t * n), up_weights = read<float>(in, t * k);
    std::vector<float> query(t * r), logits(t * n), rstd(t), weights(t * k), lse(t);
    std::vector<int64_t> indices(t * k);
    Tensors given{};
    given.x = x.data(), given.weight = weight.data(), given.gain = gain.data();
    given.anchors = anchors.data(), given.query = query.data(), given.logits = logits.data();
    given.rstd = rstd.data(), given.weights = weights.data(), given.indices = indices.data();
    given.lse = lse.data();
    const Call call{s, c[0], 1, 0, given};
    if (l2r_forward(&call)) return 4;
    Tensors up{}, grads{};
    up.logits = up_logits.data(), up.weights = up_weights.data();
    std::vector<char> grad_x(x.size());
    std::vector<float> grad_weight(r * d), grad_gain(d), grad_anchors(anchors.size());
    grads.x = grad_x.data(), grads.weight = grad_weight.data(), grads.gain = grad_gain.data();
    grads.anchors = grad_anchors.data();
    if (l2r_backward(&call, &up, &grads)) return 5;
    for (const auto* each : {&logits, &weights, &grad_weight, &grad_gain, &grad_anchors})
      write(out, *each);
    write(out, indices);
    write(out, grad_x);
  }
  fclose(out);
}
