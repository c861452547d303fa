// The architectures that nvcc compiled for, in the form of __CUDA_ARCH_LIST__: "800,900".
#define EDGELESS_TEXT_OF(...) #__VA_ARGS__
#define EDGELESS_TEXT(...) EDGELESS_TEXT_OF(__VA_ARGS__)

namespace edgeless::cuda {

const char* built_archs() { return EDGELESS_TEXT(__CUDA_ARCH_LIST__); }

}  // namespace edgeless::cuda
