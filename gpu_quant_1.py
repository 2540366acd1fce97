import torch, sys, traceback
import torch.nn.functional as F
from modeling.quantisation import activations as ref
torch.manual_seed(0)
dev="cuda"
def timed(fns, reps=40):
    # fns: list of callables over different weight copies
    for f in fns: f()
    torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    s=torch.cuda.Stream()
    with torch.cuda.stream(s):
        for f in fns: f()
    torch.cuda.synchronize()
    with torch.cuda.graph(g):
        for i in range(8):
            for f in fns: f()
    n=8*len(fns)
    for _ in range(2): g.replay()
    torch.cuda.synchronize()
    a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(4): g.replay()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b)/(4*n)*1e3
def rel(a,b): return float((a.float()-b.float()).norm()/b.float().norm())
try:
    from modeling.quantisation import triton as own
    for shape in ((3,4096),(64,14336),(5,48)):
        x=torch.randn(shape,device=dev,dtype=torch.bfloat16)*3; x[0]=0
        c,s=own.by_token(x); rc,rs=ref.by_token(x)
        print("by_token", shape, torch.equal(c.view(torch.uint8),rc.view(torch.uint8)), torch.equal(s,rs))
    x=torch.randn(37,4096,device=dev,dtype=torch.bfloat16)
    c,s=own.by_group(x,128); rc,rs=ref.by_group(x,128); print("by_group", torch.equal(c.view(torch.uint8),rc.view(torch.uint8)), torch.equal(s,rs))
except Exception: traceback.print_exc(limit=2); own=None
from torch.nn.functional import scaled_mm, ScalingType, SwizzleType
errs=set()
for K,N in ((4096,6144),(4096,4096),(4096,28672),(14336,4096)):
    copies=max(1,int(2e8/(N*K)))+1
    W=[torch.randn(N,K,device=dev,dtype=torch.bfloat16)*0.02 for _ in range(copies)]
    w8=[ref.by_token(w) for w in W]
    wb=[]
    for w in W:
        b=w.view(N//128,128,K//128,128).float(); s=b.abs().amax((1,3))/448
        wb.append(((b/s[:,None,:,None]).to(torch.float8_e4m3fn).view(N,K), s))
    int4=[]
    for w in W:
        q=torch.randint(0,16,(N,K),device=dev,dtype=torch.int32)
        packed=torch._convert_weight_to_int4pack(((q[:,::2]<<4)|q[:,1::2]).to(torch.uint8),8)
        sz=torch.stack([torch.full((K//128,N),0.01,device=dev),torch.zeros(K//128,N,device=dev)],-1).to(torch.bfloat16)
        int4.append((packed,sz,q))
    for M in (1,64,256,2048):
        x=torch.randn(M,K,device=dev,dtype=torch.bfloat16)
        out=torch.empty(M,N,device=dev,dtype=torch.bfloat16)
        line=[f"{K}x{N} M={M}"]
        def case(name, fns, check=None, want=None):
            try:
                e="" if check is None else f" err {rel(check(),want):.4f}"
                line.append(f"{name} {timed(fns):.1f}{e}")
            except Exception as error:
                line.append(f"{name} FAIL")
                t=f"{name}: {str(error)[:300]}"
                if name not in {e.split(':')[0] for e in errs}: errs.add(t)
        truth=F.linear(x,W[0])
        case("bf16",[lambda w=w: F.linear(x,w) for w in W])
        xq,xs=ref.by_token(x)
        for fast in (True,False):
            row=lambda w,fast=fast: torch._scaled_mm(xq,w[0].t(),scale_a=xs,scale_b=w[1].t(),out_dtype=torch.bfloat16,use_fast_accum=fast)
            case(f"row{'+' if fast else '-'}",[lambda w=w: row(w) for w in w8],lambda: row(w8[0]),truth)
        if own is not None:
            case("q",[lambda: own.by_token(x)])
            case("q+row",[lambda w=w: torch._scaled_mm(*((lambda c: (c[0],w[0].t(),c[1]))(own.by_token(x))),scale_b=w[1].t(),out_dtype=torch.bfloat16,use_fast_accum=True) for w in w8])
        gq,gs=ref.by_group(x,128); gs_t=gs.t().contiguous().t()
        b128=lambda w: scaled_mm(gq,w[0].t(),gs_t,ScalingType.BlockWise1x128,w[1].t(),ScalingType.BlockWise128x128,output_dtype=torch.bfloat16)
        case("blk128",[lambda w=w: b128(w) for w in wb],lambda: b128(wb[0]),truth)
        rows=[s.repeat_interleave(128,0).t().contiguous().t() for _,s in wb]
        b1=lambda i: scaled_mm(gq,wb[i][0].t(),gs_t,ScalingType.BlockWise1x128,rows[i].t(),ScalingType.BlockWise1x128,output_dtype=torch.bfloat16)
        case("blk1",[lambda i=i: b1(i) for i in range(copies)],lambda: b1(0),truth)
        t4=F.linear(x,((int4[0][2]-8)*0.01).to(torch.bfloat16))
        i4=lambda w: torch._weight_int4pack_mm(x,w[0],128,w[1])
        case("tiny4",[lambda w=w: i4(w) for w in int4],lambda: i4(int4[0]),t4)
        print(" | ".join(line),flush=True)
    del W,w8,wb,int4
for e in errs: print("ERR",e)
