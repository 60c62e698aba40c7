// What examples/fashion_mnist shows and writes, on rank 0.
#pragma once

#include <mixtape.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <sstream>
#include <string>

#include "examples/fashion_mnist/options.h"
#include "io/event_writer.h"
#include "io/line_plot.h"
#include "io/progress.h"

namespace fashion_mnist {

struct Report {
  const Options& o;
  mt::io::EventWriter events{o.out};
  mt::io::PlotSeries train_loss{.name = "training loss"},
      test_error{.name = "test error (share)", .markers = true};
  mt::io::ProgressBar bar;

  Report(const Options& options, std::int64_t parameters, std::int64_t steps_per_epoch)
      : o(options),
        bar(stdout, {.epochs = o.epochs, .samples_per_epoch = steps_per_epoch * o.batch}) {
    std::printf("Fashion-MNIST: %lld parameters, %s on %s, %d epochs of %lld steps\n",
                static_cast<long long>(parameters), o.precision.c_str(), o.device.c_str(), o.epochs,
                static_cast<long long>(steps_per_epoch));
  }
  void log(std::int64_t step, double loss, double lr) {
    events.scalars({{"loss/train", loss}, {"lr", lr}}, step);
    train_loss.x.push_back(static_cast<double>(step));
    train_loss.y.push_back(loss);
  }
  void log_accuracy(std::int64_t step, double accuracy) {
    events.scalar("accuracy/test", accuracy, step);
    test_error.x.push_back(static_cast<double>(step));
    test_error.y.push_back(1 - accuracy);
  }
  /// The plot's points, for a checkpoint: "step loss step loss ...;step error ...".
  std::string curves() const {
    std::ostringstream text;
    text.precision(17);
    for (std::size_t i = 0; i < train_loss.x.size(); ++i)
      text << train_loss.x[i] << ' ' << train_loss.y[i] << ' ';
    text << ';';
    for (std::size_t i = 0; i < test_error.x.size(); ++i)
      text << test_error.x[i] << ' ' << test_error.y[i] << ' ';
    return text.str();
  }
  void restore_curves(const std::string& text) {
    const std::size_t middle = std::min(text.find(';'), text.size());
    const auto read = [](const std::string& points, mt::io::PlotSeries& series) {
      std::istringstream in(points);
      for (double x, y; in >> x >> y;) {
        series.x.push_back(x);
        series.y.push_back(y);
      }
    };
    read(text.substr(0, middle), train_loss);
    if (middle < text.size()) read(text.substr(middle + 1), test_error);
  }
  void finish(double accuracy, double seconds, const std::string& communication,
              mt::Device device) {
    const std::filesystem::path plot = std::filesystem::path(o.out) / "loss.svg";
    mt::io::write_line_plot(plot, {train_loss, test_error},
                            {.title = "Fashion-MNIST, " + o.precision,
                             .x_label = "step",
                             .y_label = "loss",
                             .smoothing = 0.8});
    const mt::MemoryStats memory = mt::memory_stats(device);
    std::printf("\nTest accuracy  %.2f %%  (%d epochs in %.1f s)\n", 100 * accuracy, o.epochs,
                seconds);
    std::printf("%sPeak memory    %.1f MiB in tensors, %.1f MiB reserved\n", communication.c_str(),
                static_cast<double>(memory.allocated_peak) / 1048576,
                static_cast<double>(memory.reserved_peak) / 1048576);
    std::printf("Loss curve     %s\n               %s (tensorboard --logdir %s)\n", plot.c_str(),
                events.path().c_str(), o.out.c_str());
    std::printf("Next           try --precision fp16, --epochs 10 or --seed 2; the model is %s\n",
                "examples/fashion_mnist/main.cpp");
  }
};

}  // namespace fashion_mnist
