// CPU emulation of CUDA C++ for checks of logic: each thread is a fiber; blocks one after the other.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
#include <algorithm>
#include <ucontext.h>
using std::isfinite;
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
struct uint2 { uint32_t x, y; }; struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; }; struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t a, uint32_t b){return {a,b};}
inline uint4 make_uint4(uint32_t a, uint32_t b, uint32_t c, uint32_t d){return {a,b,c,d};}
inline int4 make_int4(int a,int b,int c,int d){return {a,b,c,d};}
inline float2 make_float2(float a, float b){return {a,b};}
inline float4 make_float4(float a,float b,float c,float d){return {a,b,c,d};}
struct Dim { unsigned x=1,y=1,z=1; };
inline Dim threadIdx, blockIdx, blockDim, gridDim;
inline char* emu_dynamic;
inline size_t emu_dynamic_bytes;
using std::min; using std::max;
inline unsigned min(unsigned a, int b){return a<(unsigned)b?a:(unsigned)b;}
inline long long min(long long a, int b){return a<b?a:b;}
template<class T> inline T __ldg(const T* p){return *p;}
template<class T> inline T __ldcg(const T* p){return *p;}
inline float __uint_as_float(uint32_t u){float f;memcpy(&f,&u,4);return f;}
inline uint32_t __float_as_uint(float f){uint32_t u;memcpy(&u,&f,4);return u;}
inline float __int_as_float(int u){float f;memcpy(&f,&u,4);return f;}
inline uint32_t __umulhi(uint32_t a,uint32_t b){return (uint64_t)a*b>>32;}
inline int __float_as_int(float f){int u;memcpy(&u,&f,4);return u;}
inline int __popc(uint32_t u){return __builtin_popcount(u);}
inline void __threadfence(){}
inline double cospi(double x){return cos(M_PI*x);}
inline int atomicAdd(int* p,int v){int o=*p;*p+=v;return o;}
inline uint32_t __cvta_generic_to_shared(const void* p){return (uint32_t)((char*)p-emu_dynamic);}
// fibers
struct Emu {
  static constexpr int STACK=64*1024;
  int n=0, cur=-1; ucontext_t sched; std::vector<ucontext_t> ctx; std::vector<char> done; std::vector<char> stacks;
  int live=0; std::vector<int> wlive; int barcnt=0; unsigned bargen=0; std::vector<int> wcnt; std::vector<unsigned> wgen;
  uint32_t shf[1024]; char blocked[1024]; void (*fn)(void*); void* arg;
};
inline Emu E;
inline void emu_yield(){ int c=E.cur; swapcontext(&E.ctx[c],&E.sched); }
inline void __syncthreads(){ unsigned g=E.bargen; E.barcnt++; if(E.barcnt>=E.live){E.barcnt=0;E.bargen++;return;} int c=E.cur; E.blocked[c]=1; while(E.bargen==g) emu_yield(); E.blocked[c]=0; }
inline int emu_named_count[16]; inline unsigned emu_named_turn[16];
inline void emu_named_barrier(uint32_t id, uint32_t threads){ unsigned g=emu_named_turn[id]; if(++emu_named_count[id]==(int)threads){emu_named_count[id]=0;emu_named_turn[id]++;return;} int c=E.cur; E.blocked[c]=1; while(emu_named_turn[id]==g) emu_yield(); E.blocked[c]=0; }
inline void emu_warpsync(){ int w=E.cur/32; unsigned g=E.wgen[w]; E.wcnt[w]++; if(E.wcnt[w]>=E.wlive[w]){E.wcnt[w]=0;E.wgen[w]++;return;} while(E.wgen[w]==g) emu_yield(); }
template<class T> inline T emu_shfl(T v,int src){ static_assert(sizeof(T)==4); memcpy(&E.shf[E.cur],&v,4); emu_warpsync(); T r; int w=E.cur/32*32; memcpy(&r,&E.shf[w+(src&31)],4); emu_warpsync(); return r; }
template<class T> inline T __shfl_xor_sync(uint32_t,T v,int o){return emu_shfl(v,(E.cur%32)^o);}
template<class T> inline T __shfl_sync(uint32_t,T v,int s){return emu_shfl(v,s);}
template<class T> inline T __shfl_up_sync(uint32_t,T v,int o){int l=E.cur%32; return emu_shfl(v,l>=o?l-o:l);}
inline uint32_t __ballot_sync(uint32_t,bool b){ E.shf[E.cur]=b; emu_warpsync(); uint32_t r=0; int w=E.cur/32*32; for(int l=0;l<32&&w+l<E.n;l++) r|=E.shf[w+l]<<l; emu_warpsync(); return r; }
inline uint32_t __match_any_sync(uint32_t,int v){ memcpy(&E.shf[E.cur],&v,4); emu_warpsync(); uint32_t r=0,u; memcpy(&u,&v,4); int w=E.cur/32*32; for(int l=0;l<32&&w+l<E.n;l++) r|=(uint32_t)(E.shf[w+l]==u)<<l; emu_warpsync(); return r; }
inline void __syncwarp(){ emu_warpsync(); }
inline int __reduce_add_sync(uint32_t,int v){ for(int o=16;o>0;o/=2) v+=__shfl_xor_sync(0,v,o); return v; }
inline int __reduce_max_sync(uint32_t,int v){ for(int o=16;o>0;o/=2) v=std::max(v,__shfl_xor_sync(0,v,o)); return v; }
inline void emu_entry(){ E.fn(E.arg); int c=E.cur; E.done[c]=1; E.live--; E.wlive[c/32]--; 
  if(E.live>0&&E.barcnt>=E.live&&E.barcnt>0){E.barcnt=0;E.bargen++;}
  int w=c/32; if(E.wlive[w]>0&&E.wcnt[w]>=E.wlive[w]&&E.wcnt[w]>0){E.wcnt[w]=0;E.wgen[w]++;}
  swapcontext(&E.ctx[c],&E.sched); }
inline void emu_launch(void(*fn)(void*),void*arg,unsigned gx,unsigned gy,unsigned gz,unsigned threads,size_t shared,int order){
  std::vector<char> dyn(shared+64); emu_dynamic=(char*)(((uintptr_t)dyn.data()+31)&~(uintptr_t)31); emu_dynamic_bytes=shared;
  E.n=threads; E.fn=fn; E.arg=arg; E.ctx.resize(threads); E.stacks.resize((size_t)threads*Emu::STACK);
  gridDim={gx,gy,gz}; blockDim={threads,1,1}; size_t total=(size_t)gx*gy*gz;
  for(size_t q=0;q<total;q++){ size_t b=order?total-1-q:q;
    memset(dyn.data(),0xff,dyn.size()); memset(E.blocked,0,1024);
    blockIdx={(unsigned)(b%gx),(unsigned)(b/gx%gy),(unsigned)(b/gx/gy)};
    E.done.assign(threads,0); E.live=threads; E.wlive.assign((threads+31)/32,0); E.wcnt.assign((threads+31)/32,0); E.wgen.assign((threads+31)/32,0); E.barcnt=0;E.bargen=0;
    for(unsigned t=0;t<threads;t++){E.wlive[t/32]++; getcontext(&E.ctx[t]); E.ctx[t].uc_stack.ss_sp=&E.stacks[(size_t)t*Emu::STACK]; E.ctx[t].uc_stack.ss_size=Emu::STACK; E.ctx[t].uc_link=&E.sched; makecontext(&E.ctx[t],emu_entry,0);}
    long rounds=0;
    while(E.live>0){ if(++rounds>10000000){fprintf(stderr,"emu: deadlock\n");abort();}
      // order 1: warps backwards, each runs until all its threads are done or wait at the CTA's barrier (one warp far ahead)
      if(order==1){ for(int w=(threads+31)/32-1;w>=0;w--){ bool again=true; while(again){ again=false; for(unsigned t=w*32;t<threads&&t<(unsigned)w*32+32;t++) if(!E.done[t]){ E.cur=t; threadIdx={t,0,0}; swapcontext(&E.sched,&E.ctx[t]); if(!E.done[t]&&!E.blocked[t]) again=true; } } } }
      else for(unsigned t=0;t<threads;t++) if(!E.done[t]){E.cur=t; threadIdx={t,0,0}; swapcontext(&E.sched,&E.ctx[t]);} }
  } }
