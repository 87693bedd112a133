// The interop driver: reads commands as JSON lines, WORKERS at a time on a connection each, and answers with JSON lines.
import { join } from "node:path";
import { createInterface } from "node:readline";
import { type Client, Metadata, type ServiceError } from "@grpc/grpc-js";
import { service as health } from "grpc-health-check";
import { connect, finish } from "./decide";
import {
  DecideRequest,
  type DecideResponse,
  type DecisionServiceClient,
  DecisionServiceService,
  decisionStatusToJSON,
  GetDecisionStatusRequest,
  type GetDecisionStatusResponse,
} from "./generated/decideonce/v1/decision_service";
import { ErrorInfo } from "./generated/google/rpc/error_details";
import { Status } from "./generated/google/rpc/status";

type Fields = Record<string, unknown>;
type Command = { id: number; do: string; request: string; within_s: number };
type Received<Answer> = { data: Buffer; answer: Answer };
type Unary<Request, Answer> = {
  path: string;
  requestSerialize: (request: Request) => Buffer;
  responseDeserialize: (data: Buffer) => Answer;
};

const TOKEN = process.env.DECIDEONCE_TOKEN ?? "";
const METADATA = new Metadata({ waitForReady: true });
METADATA.set("authorization", `Bearer ${TOKEN}`);
const ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo";

const HEALTH_CHECK: Unary<Buffer, { status: string }> = {
  ...(health.Check as unknown as Unary<unknown, { status: string }>),
  requestSerialize: (bytes) => bytes,
};

/** Make a call that gives the answer together with its bytes as they came. */
function call<Request, Answer>(client: Client, method: Unary<Request, Answer>, request: Request, metadata = METADATA) {
  const deserialize = (data: Buffer) => ({ data, answer: method.responseDeserialize(data) });
  return new Promise<Received<Answer>>((resolve, reject) => {
    client.makeUnaryRequest(method.path, method.requestSerialize, deserialize, request, metadata, (error, received) =>
      error ? reject(error) : resolve(received as Received<Answer>),
    );
  });
}

async function run(client: DecisionServiceClient, command: Command): Promise<Fields> {
  const bytes = Buffer.from(command.request, "base64");
  switch (command.do) {
    case "decide": {
      const request = DecideRequest.decode(bytes);
      const { data, answer } = await call(client, DecisionServiceService.decide, request);
      return { ...said(answer), replayed: answer.replayed, raw: data.toString("base64") };
    }
    case "status": {
      const request = GetDecisionStatusRequest.decode(bytes);
      const { data, answer } = await call(client, DecisionServiceService.getDecisionStatus, request);
      return { ...said(answer), raw: data.toString("base64") };
    }
    case "finish":
      return said(await finish(client, TOKEN, bytes, command.within_s));
    case "health": {
      const { answer } = await call(client, HEALTH_CHECK, bytes, new Metadata());
      return { code: 0, status: answer.status };
    }
    default:
      throw new Error(`no such command: ${command.do}`);
  }
}

function said(answer: Omit<DecideResponse, "replayed"> | GetDecisionStatusResponse): Fields {
  const { seconds, nanos } = answer.retryAfter ?? { seconds: 0, nanos: 0 };
  return {
    code: 0,
    status: decisionStatusToJSON(answer.status),
    outcome: answer.decision?.outcome ?? "",
    decision_id: answer.provenance?.decisionId ?? "",
    reason: answer.failure?.reason ?? "",
    retry_after_ms: seconds * 1000 + nanos / 1e6,
  };
}

function failed(error: ServiceError): Fields {
  const answer: Fields = { code: error.code, message: error.details };
  for (const packed of error.metadata?.get("grpc-status-details-bin") ?? []) {
    const detail = Status.decode(packed as Buffer).details.find(({ typeUrl }) => typeUrl === ERROR_INFO);
    if (detail !== undefined) {
      const { reason, domain, metadata } = ErrorInfo.decode(detail.value);
      answer.error = { reason, domain, metadata };
    }
  }
  return answer;
}

async function work(lines: AsyncIterator<string>): Promise<void> {
  const client = connect(join(__dirname, "../service_config.json"), { "grpc.use_local_subchannel_pool": 1 });
  for (;;) {
    const line = await lines.next();
    if (line.done) {
      client.close();
      return;
    }
    const command = JSON.parse(line.value) as Command;
    const answer = await run(client, command).catch((error) => {
      if (error.code === undefined) {
        throw error;
      }
      return failed(error);
    });
    console.log(JSON.stringify({ id: command.id, ...answer }));
  }
}

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
Promise.all(Array.from({ length: Number(process.argv[2]) }, () => work(lines)));
