// Convolutions of float32 arrays through oneDNN, as XLA custom calls: forward, and the gradients of input and weight.
//
// Arrays are N x C x features and c_out x C/groups x kernel, row-major, as XLA hands them over. oneDNN computes in orders
// of its own, so operands are brought into these first. The memory for that is a second result of each call: XLA
// allocates it, counts it and uses it again.
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"
#include "xla/ffi/api/ffi.h"

#if DNNL_VERSION_MAJOR < 3
#error "oneDNN 3 or newer is needed"
#endif

namespace {

namespace ffi = xla::ffi;
using dnnl::memory;
using Dims = memory::dims;
using Ints = ffi::Span<const int64_t>;
using Floats = ffi::Buffer<ffi::F32>;
using Bytes = ffi::Buffer<ffi::U8>;

enum Direction : int64_t { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT };

// In which order activations are in memory while oneDNN computes: its own choice, as they are, or channels last.
enum Order : int64_t { CHOSEN, AS_THEY_ARE, CHANNELS_LAST };

dnnl::engine& engine() {
  static dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

dnnl::stream& stream() {
  thread_local dnnl::stream own(engine());
  return own;
}

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

memory::desc row_major(const Dims& shape) {
  Dims strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
  return memory::desc(shape, memory::data_type::f32, strides);
}

memory::desc activations(const Dims& shape, Order order) {
  using Tag = memory::format_tag;
  static constexpr Tag channels_last[] = {Tag::nwc, Tag::nhwc, Tag::ndhwc};
  if (order == AS_THEY_ARE) return row_major(shape);
  const Tag tag = order == CHANNELS_LAST ? channels_last[shape.size() - 3] : Tag::any;
  return memory::desc(shape, memory::data_type::f32, tag);
}

// How many threads a call uses; oneDNN's OpenMP asks each calling thread.
int threads = 1;

void limit_threads() {
  using Set = void (*)(int);
  static const Set set = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set) set(threads);
}

// An operand: as XLA has it, as the primitive wants it, and what brings it from the one to the other, if they differ.
struct Operand {
  int argument = 0;
  memory::desc given, wanted;
  dnnl::reorder reorder;
  bool is_moved = false;
  size_t offset = 0;
};

// Two operands, the result, oneDNN's scratchpad, and where they are in the memory that a call is given.
struct Plan {
  dnnl::primitive primitive;
  std::array<Operand, 3> operands;
  memory::desc scratchpad;
  size_t scratchpad_offset = 0, bytes = 0;

  // Number 2 is the result, which is brought back.
  void add(int i, int argument, const memory::desc& given, const memory::desc& wanted) {
    Operand& operand = operands[i];
    operand.argument = argument, operand.given = given, operand.wanted = wanted;
    operand.is_moved = given != wanted;
    if (!operand.is_moved) return;
    const memory::desc &from = i == 2 ? wanted : given, &to = i == 2 ? given : wanted;
    operand.reorder = dnnl::reorder(dnnl::reorder::primitive_desc(engine(), from, engine(), to));
    operand.offset = bytes;
    bytes += aligned(wanted.get_size());
  }

  void add_scratchpad(const memory::desc& wanted) {
    scratchpad = wanted, scratchpad_offset = bytes;
    bytes += aligned(wanted.get_size());
  }

  void run(const std::array<void*, 3>& data, char* own) const {
    std::unordered_map<int, memory> arguments;
    for (int i = 0; i < 3; ++i) {
      const Operand& operand = operands[i];
      memory given(operand.given, engine(), data[i]), wanted = given;
      if (operand.is_moved) wanted = memory(operand.wanted, engine(), own + operand.offset);
      if (operand.is_moved && i < 2) operand.reorder.execute(stream(), given, wanted);
      arguments.emplace(operand.argument, wanted);
    }
    arguments.emplace(DNNL_ARG_SCRATCHPAD, memory(scratchpad, engine(), own + scratchpad_offset));
    primitive.execute(stream(), arguments);
    if (const Operand& result = operands[2]; result.is_moved) {
      memory given(result.given, engine(), data[2]);
      result.reorder.execute(stream(), arguments.at(result.argument), given);
    }
    stream().wait();
  }
};

// What is computed: the shapes, and how the kernel lies on x. `dilation` is 1 where taps are neighbours.
struct Problem {
  Direction direction;
  Dims x, weight, y, stride, dilation, low, high;
  int64_t groups;
  Order order;

  std::vector<int64_t> key() const {
    std::vector<int64_t> all{direction, groups, order};
    for (const Dims* dims : {&x, &weight, &y, &stride, &dilation, &low, &high})
      all.insert(all.end(), dims->begin(), dims->end());
    return all;
  }
};

// oneDNN's reference loops take hundreds of times as long.
template <class Description>
const Description& fast(const Description& description) {
  if (std::string(description.impl_info_str()).rfind("ref", 0) == 0)
    throw std::runtime_error("oneDNN has nothing but its reference loops for it");
  return description;
}

std::shared_ptr<const Plan> planned(const Problem& problem) {
  Dims kernel = problem.weight, gaps = problem.dilation;
  for (int64_t& gap : gaps) --gap;
  if (problem.groups > 1) {
    kernel[0] /= problem.groups;
    kernel.insert(kernel.begin(), problem.groups);
  }
  const memory::desc x = activations(problem.x, problem.order), y = activations(problem.y, problem.order);
  const memory::desc weight(kernel, memory::data_type::f32, memory::format_tag::any);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const auto direct = dnnl::algorithm::convolution_direct;
  const bool is_forward = problem.direction == FORWARD;
  const dnnl::convolution_forward::primitive_desc forward(
      engine(), is_forward ? dnnl::prop_kind::forward_inference : dnnl::prop_kind::forward_training, direct, x, weight,
      y, problem.stride, gaps, problem.low, problem.high, attributes);
  auto plan = std::make_shared<Plan>();
  if (is_forward) {
    plan->primitive = dnnl::convolution_forward(fast(forward));
    plan->add(0, DNNL_ARG_SRC, row_major(problem.x), forward.src_desc());
    plan->add(1, DNNL_ARG_WEIGHTS, row_major(kernel), forward.weights_desc());
    plan->add(2, DNNL_ARG_DST, row_major(problem.y), forward.dst_desc());
    plan->add_scratchpad(forward.scratchpad_desc());
  } else if (problem.direction == INPUT_GRADIENT) {
    const dnnl::convolution_backward_data::primitive_desc gradient(
        engine(), direct, x, weight, y, problem.stride, gaps, problem.low, problem.high, forward, attributes);
    plan->primitive = dnnl::convolution_backward_data(fast(gradient));
    plan->add(0, DNNL_ARG_WEIGHTS, row_major(kernel), gradient.weights_desc());
    plan->add(1, DNNL_ARG_DIFF_DST, row_major(problem.y), gradient.diff_dst_desc());
    plan->add(2, DNNL_ARG_DIFF_SRC, row_major(problem.x), gradient.diff_src_desc());
    plan->add_scratchpad(gradient.scratchpad_desc());
  } else {
    const dnnl::convolution_backward_weights::primitive_desc gradient(
        engine(), direct, x, weight, y, problem.stride, gaps, problem.low, problem.high, forward, attributes);
    plan->primitive = dnnl::convolution_backward_weights(fast(gradient));
    plan->add(0, DNNL_ARG_SRC, row_major(problem.x), gradient.src_desc());
    plan->add(1, DNNL_ARG_DIFF_DST, row_major(problem.y), gradient.diff_dst_desc());
    plan->add(2, DNNL_ARG_DIFF_WEIGHTS, row_major(kernel), gradient.diff_weights_desc());
    plan->add_scratchpad(gradient.scratchpad_desc());
  }
  return plan;
}

// The plans that were used last: each holds compiled code, so their number is bounded.
class Plans {
 public:
  std::shared_ptr<const Plan> operator()(const Problem& problem) {
    auto key = problem.key();
    std::lock_guard<std::mutex> held(lock_);
    if (auto found = places_.find(key); found != places_.end()) {
      used_.splice(used_.begin(), used_, found->second);
      return used_.front().second;
    }
    auto plan = planned(problem);
    used_.emplace_front(key, plan);
    places_[std::move(key)] = used_.begin();
    if (used_.size() > most_) {
      places_.erase(used_.back().first);
      used_.pop_back();
    }
    return plan;
  }

 private:
  using Used = std::list<std::pair<std::vector<int64_t>, std::shared_ptr<const Plan>>>;
  static constexpr size_t most_ = 512;
  std::mutex lock_;
  Used used_;
  std::map<std::vector<int64_t>, Used::iterator> places_;
};

Plans& plans() {
  static Plans all;
  return all;
}

Dims dims(Ints ints) { return Dims(ints.begin(), ints.end()); }

// Forward of x and the weight, the input's gradient of the weight and dy, the weight's of x and dy.
template <Direction direction>
ffi::Error run(Floats one, Floats other, ffi::Result<Floats> result, ffi::Result<Bytes> own, Ints stride, Ints dilation,
               Ints low, Ints high, int64_t groups, int64_t order) {
  const Dims a = dims(one.dimensions()), b = dims(other.dimensions()), c = dims(result->dimensions());
  const bool is_forward = direction == FORWARD, of_input = direction == INPUT_GRADIENT;
  const Problem problem{direction,
                        of_input ? c : a,
                        of_input ? a : is_forward ? b : c,
                        is_forward ? c : b,
                        dims(stride),
                        dims(dilation),
                        dims(low),
                        dims(high),
                        groups,
                        Order(order)};
  try {
    limit_threads();
    const auto plan = plans()(problem);
    if (plan->bytes > own->element_count())
      throw std::runtime_error("this program was compiled on a processor where oneDNN needs less memory");
    plan->run({one.typed_data(), other.typed_data(), result->typed_data()}, reinterpret_cast<char*>(own->typed_data()));
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("A convolution by oneDNN failed: ") + error.what());
  }
  return ffi::Error::Success();
}

auto call() {
  return ffi::Ffi::Bind()
      .Arg<Floats>()
      .Arg<Floats>()
      .Ret<Floats>()
      .Ret<Bytes>()
      .Attr<Ints>("stride")
      .Attr<Ints>("dilation")
      .Attr<Ints>("low")
      .Attr<Ints>("high")
      .Attr<int64_t>("groups")
      .Attr<int64_t>("order");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_forward, run<FORWARD>, call());
XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_input_gradient, run<INPUT_GRADIENT>, call());
XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_weight_gradient, run<WEIGHT_GRADIENT>, call());

extern "C" {

// What this file was compiled for: DISTDL_JAX_MADE_FOR names its own text and jaxlib.
const char* convolution_made_for() { return DISTDL_JAX_MADE_FOR; }

// oneDNN's version, as loaded: 30200 for 3.2.0.
int64_t convolution_onednn_version() {
  const dnnl_version_t* told = dnnl_version();
  return told->major * 10000 + told->minor * 100 + told->patch;
}

void convolution_set_threads(int64_t count) { threads = int(count); }

// How many bytes a call needs beside its operands and its result; -1 where oneDNN has nothing fast to compute it.
// `all` holds x, weight and y, of `rank` entries each, then stride, dilation, low and high, of two less.
int64_t convolution_bytes_needed(int64_t direction, int64_t order, int64_t groups, int64_t rank, const int64_t* all) {
  Problem problem{Direction(direction), {}, {}, {}, {}, {}, {}, {}, groups, Order(order)};
  for (Dims* shape : {&problem.x, &problem.weight, &problem.y}) shape->assign(all, all + rank), all += rank;
  for (Dims* each : {&problem.stride, &problem.dilation, &problem.low, &problem.high})
    each->assign(all, all + rank - 2), all += rank - 2;
  try {
    limit_threads();
    return int64_t(plans()(problem)->bytes);
  } catch (const std::exception&) {
    return -1;
  }
}
}
