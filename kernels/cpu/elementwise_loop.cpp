// Planning and running the elementwise loop. What remains after merging dimensions is `rows` rows
// of `inner` elements; a block is a piece of one long row, or several whole short rows.
#include "kernels/cpu/elementwise_loop.h"

#include <algorithm>

#include "engine/thread_pool.h"
#include "kernels/cpu/load_store.h"
#include "kernels/cpu/loop_dims.h"

namespace mixtape::kernels::cpu {

namespace {

static_assert(kMaxInputs + 1 <= LoopDims::kMaxOperands);

/// How an operand's elements for a block are found.
enum class Access : std::uint8_t {
  dense,     // one run over the whole loop
  repeated,  // the same for every block: outer strides are 0 and a block is whole rows
  rows,      // row by row
};

struct LoopOperand {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
  Access access = Access::rows;
  LoadFunction load = nullptr;
  alignas(8) unsigned char number[8];  // a scalar operand's value, in the compute type
};

struct Loop {
  Dtype compute;
  int inputs = 0;  // operand `inputs` is the output
  LoopDims dims;
  std::int64_t inner, rows;
  std::int64_t rows_per_block = 1, chunk = 1, chunks_per_row = 1, blocks = 1;
  LoopOperand operands[kMaxInputs + 1];
  StoreFunction store;
};

/// Fills the strides of operand k, 0 where x broadcasts.
void add_view(const char* kernel, Loop& loop, int k, const View& out, const View& x) {
  loop.operands[k].data = x.data;
  loop.operands[k].dtype = x.dtype;
  const int shift = out.dim() - x.dim();
  bool valid = shift >= 0;
  for (int i = 0, d = 0; valid && i < out.dim(); ++i) {
    const std::int64_t size = i < shift ? 1 : x.sizes[i - shift];
    valid = size == 1 || size == out.sizes[i];
    if (out.sizes[i] != 1) loop.dims.strides[k][d++] = size == 1 ? 0 : x.strides[i - shift];
  }
  MT_CHECK(valid, kernel, ": expected operands that broadcast to ", out.sizes, ", got ", x.sizes);
}

void add_number(Loop& loop, int k, const Scalar& value) {
  LoopOperand& o = loop.operands[k];
  store_scalar(value, loop.compute, o.number);
  o.data = o.number;
  o.dtype = loop.compute;
  std::fill_n(loop.dims.strides[k], loop.dims.count, 0);
}

Access access_of(const Loop& loop, int k) {
  const LoopDims& dims = loop.dims;
  std::int64_t run = 1;
  bool dense = true, outer_zero = true;
  for (int d = dims.count - 1; d >= 0; --d) {
    dense &= dims.strides[k][d] == run;
    outer_zero &= d == dims.count - 1 || dims.strides[k][d] == 0;
    run *= dims.sizes[d];
  }
  if (dense) return Access::dense;
  const bool one_number = outer_zero && dims.inner_stride(k) == 0;
  return one_number || (outer_zero && loop.chunks_per_row == 1) ? Access::repeated : Access::rows;
}

void plan_blocks(Loop& loop) {
  loop.inner = loop.dims.inner();
  loop.rows = loop.dims.rows();
  if (loop.inner > kBlockElements / 2) {
    const std::int64_t pieces = (loop.inner + kBlockElements - 1) / kBlockElements;
    const std::int64_t even = (loop.inner + pieces - 1) / pieces;
    loop.chunk = std::min({(even + 63) / 64 * 64, kBlockElements, loop.inner});
    loop.chunks_per_row = (loop.inner + loop.chunk - 1) / loop.chunk;
    loop.blocks = loop.rows * loop.chunks_per_row;
  } else {
    loop.chunk = loop.inner;
    loop.rows_per_block = std::min(kBlockElements / loop.inner, loop.rows);
    loop.blocks = (loop.rows + loop.rows_per_block - 1) / loop.rows_per_block;
  }
  for (int k = 0; k <= loop.inputs; ++k) loop.operands[k].access = access_of(loop, k);
}

/// One thread's share of the blocks, with its buffers.
class Worker {
 public:
  explicit Worker(const Loop& loop) : loop_(loop) {}

  void run(std::int64_t begin, std::int64_t end, BlockFunction block, const void* params) {
    const void* in[kMaxInputs];
    const int out = loop_.inputs;
    for (std::int64_t b = begin; b < end; ++b) {
      locate(b);
      for (int k = 0; k < loop_.inputs; ++k) in[k] = gather(k);
      void* direct = direct_run(out);
      block(in, direct ? direct : buffers_[out], rows_ * len_, params);
      if (!direct) scatter();
    }
  }

 private:
  void locate(std::int64_t b) {
    row_ = b / loop_.chunks_per_row * loop_.rows_per_block;
    rows_ = std::min(loop_.rows_per_block, loop_.rows - row_);
    col_ = b % loop_.chunks_per_row * loop_.chunk;
    len_ = std::min(loop_.chunk, loop_.inner - col_);
  }

  /// The operand's own memory, where it holds this block as a run of the compute type.
  void* direct_run(int k) const {
    const LoopOperand& o = loop_.operands[k];
    if (o.dtype != loop_.compute) return nullptr;
    if (o.access == Access::dense) return element(o.data, o.dtype, row_ * loop_.inner + col_);
    if (rows_ != 1 || loop_.dims.inner_stride(k) != 1) return nullptr;
    return element(o.data, o.dtype, loop_.dims.row_offset(k, row_) + col_);
  }

  const void* gather(int k) {
    const LoopOperand& o = loop_.operands[k];
    if (o.access == Access::repeated) {
      if (!filled_[k]) fill_repeated(k, o);
      return buffers_[k];
    }
    if (const void* direct = direct_run(k)) return direct;
    if (o.access == Access::dense) {
      o.load(element(o.data, o.dtype, row_ * loop_.inner + col_), 1, rows_ * len_, buffers_[k]);
      return buffers_[k];
    }
    for_each_row(
        k, [&](void* data, void* run) { o.load(data, loop_.dims.inner_stride(k), len_, run); });
    return buffers_[k];
  }

  void fill_repeated(int k, const LoopOperand& o) {
    for (std::int64_t r = 0; r < loop_.rows_per_block; ++r)
      o.load(o.data, loop_.dims.inner_stride(k), loop_.chunk,
             element(buffers_[k], loop_.compute, r * loop_.chunk));
    filled_[k] = true;
  }

  void scatter() {
    const int k = loop_.inputs;
    const LoopOperand& o = loop_.operands[k];
    if (o.access == Access::dense) {
      loop_.store(buffers_[k], element(o.data, o.dtype, row_ * loop_.inner + col_), 1,
                  rows_ * len_);
      return;
    }
    for_each_row(k, [&](void* data, const void* run) {
      loop_.store(run, data, loop_.dims.inner_stride(k), len_);
    });
  }

  /// f(address in the operand, address in its buffer) for each row of the block.
  template <class F>
  void for_each_row(int k, F&& f) {
    const LoopOperand& o = loop_.operands[k];
    const LoopDims& dims = loop_.dims;
    std::int64_t index[kMaxDims] = {};
    std::int64_t rest = row_, offset = col_ * dims.inner_stride(k);
    for (int d = dims.count - 2; d >= 0; --d) {
      index[d] = rest % dims.sizes[d];
      rest /= dims.sizes[d];
      offset += index[d] * dims.strides[k][d];
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      void* run = buffers_[k];
      f(element(o.data, o.dtype, offset), element(run, loop_.compute, r * len_));
      for (int d = dims.count - 2; d >= 0; --d) {
        offset += dims.strides[k][d];
        if (++index[d] < dims.sizes[d]) break;
        offset -= index[d] * dims.strides[k][d];
        index[d] = 0;
      }
    }
  }

  const Loop& loop_;
  std::int64_t row_ = 0, rows_ = 1, col_ = 0, len_ = 1;
  bool filled_[kMaxInputs] = {};
  alignas(64) unsigned char buffers_[kMaxInputs + 1][kBlockElements * 8];
};

}  // namespace

void store_scalar(const Scalar& value, Dtype dtype, void* out) {
  if (value.kind() == Dtype::f64) {
    const double real = value.to<double>();
    store_function(Dtype::f64, dtype)(&real, out, 1, 1);
  } else {
    const std::int64_t integer = value.to<std::int64_t>();
    const Dtype compute = conversion_dtype(Dtype::i64, dtype);
    unsigned char number[8];
    load_function(Dtype::i64, compute)(&integer, 1, 1, number);
    store_function(compute, dtype)(number, out, 1, 1);
  }
}

void elementwise(const char* kernel, BlockFunction block, const void* params, Dtype compute,
                 const View& out, std::span<const Operand> inputs, std::int64_t grain) {
  const std::int64_t total = out.numel();
  if (total == 0) return;
  Loop loop;
  loop.compute = compute;
  loop.inputs = static_cast<int>(inputs.size());
  loop.store = store_function(compute, out.dtype);
  loop.dims.operands = loop.inputs + 1;
  for (std::int64_t size : out.sizes)
    if (size != 1) loop.dims.sizes[loop.dims.count++] = size;
  for (int k = 0; k < loop.inputs; ++k) {
    const Operand& x = inputs[static_cast<std::size_t>(k)];
    if (x.view)
      add_view(kernel, loop, k, out, x.view);
    else
      add_number(loop, k, x.scalar);
    loop.operands[k].load = load_function(loop.operands[k].dtype, compute);
  }
  add_view(kernel, loop, loop.inputs, out, out);
  loop.dims.sort_by(loop.inputs);
  loop.dims.merge();
  plan_blocks(loop);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    Worker(loop).run(begin, end, block, params);
  };
  if (total <= grain) return run(0, loop.blocks);
  const std::int64_t block_elements = loop.rows_per_block * loop.chunk;
  parallel_for(0, loop.blocks, std::max<std::int64_t>(1, grain / block_elements), run);
}

}  // namespace mixtape::kernels::cpu
