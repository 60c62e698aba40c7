// Mixtape's side of parity.py: GPT-2 from given weights on given batches, one loss a line.
#include <cstdio>
#include <fstream>
#include <limits>

#include "examples/gpt2/weights.h"
#include "tests/benchmarks/step_benchmark.h"
#include "tests/parity/train.h"

namespace mt = mixtape;

int run(int argc, char** argv) {
  const step_benchmark::Options o(argc, argv,
                                  {{"init", ""},
                                   {"tokens", ""},
                                   {"losses", ""},
                                   {"layers", "12"},
                                   {"heads", "12"},
                                   {"channels", "768"},
                                   {"vocab", "50304"},
                                   {"lr", "3e-4"},
                                   {"precision", "fp32"},
                                   {"mode", "eager"},
                                   {"device", mt::Device::best().is_cuda() ? "cuda" : "cpu"}});
  const mt::Tensor text = mt::io::SafetensorsFile(o.text("tokens")).tensor("tokens");
  const gpt2::Config config{.layers = o.number("layers"),
                            .heads = o.number("heads"),
                            .channels = o.number("channels"),
                            .context = text.size(2) - 1,
                            .vocabulary = o.number("vocab")};
  gpt2::Gpt2 net(config);
  mt::io::load_weights(o.text("init"), net, gpt2::hugging_face_map(config));
  net.to(mt::Device::parse(o.text("device")));
  std::ofstream out(o.text("losses"));
  out.precision(std::numeric_limits<float>::max_digits10);
  for (const float loss : mt::testing::train(net, text,
                                             {.precision = o.text("precision"),
                                             .lr = std::stof(o.text("lr")),
                                             .captured = o.text("mode") == "captured"}))
    out << loss << '\n';
  MT_CHECK(out.flush(), "parity_train: cannot write ", o.text("losses"));
  return 0;
}

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "parity_train: %s\n", e.what());
    return 1;
  }
}
